"""Several processes that hold one model together: how they find each other and what they compute in common."""
