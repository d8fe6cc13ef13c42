"""Request traces through the real scheduler and block manager, with a runner that computes nothing."""
