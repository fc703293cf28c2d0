"""The papers' claims as tests: what each says, what decides it, and the verdict from our runs."""
