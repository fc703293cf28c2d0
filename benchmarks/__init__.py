"""Speed: our engines compared with a bare PyTorch loop and other simulators on the same data, model
and batches."""
