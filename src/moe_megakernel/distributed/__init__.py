"""Expert parallelism: the split of experts, the group's state and checks, the exchange of rows between ranks."""
