"""trainfuse: an autodiff-aware training accelerator for PyTorch."""
