"""Speed: our engines beside a bare PyTorch loop and other simulators, on the same data, model and batches."""
