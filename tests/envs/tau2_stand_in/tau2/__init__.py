"""A stand-in of Sierra Research's tau2-bench 1.0.1: what `paw.envs.tau2` uses of it, with its
signatures."""
