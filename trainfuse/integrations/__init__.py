"""Lightning, torch.compile and the command line."""
