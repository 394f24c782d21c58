"""Training on several devices, and compiled networks: DDP, sharding, and when torch compiles again."""
