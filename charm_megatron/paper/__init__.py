"""Every figure that is quoted from the CHARM+ paper (arXiv:2611.05906), with its table."""
