collect_ignore_glob = ["tau2/*"]  # a package to be put on sys.path, not one of the tests
