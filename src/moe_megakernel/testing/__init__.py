"""Tools for tests and bug reports: input generators, a slow oracle, and comparison by relative error."""
