"""The KV cache: pool tensors (torch) and the torch-free ledger of who owns which token."""
