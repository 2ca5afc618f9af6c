"""The one error of trace analysis: a line that names the file, what was expected and what is there."""

from __future__ import annotations


class ProfileError(ValueError):
    """A trace, a rules file or an option cannot be used: `profile: where: expected ..., got ...`.

    `exit_code` is what the command line ends with: 2 for something wrong with the arguments (no such file), 1 for a
    file that is there and does not hold what it should.
    """

    def __init__(self, where: object, expected: str, got: object, exit_code: int = 1) -> None:
        super().__init__(f"profile: {where}: expected {expected}, got {got}")
        self.exit_code = exit_code
