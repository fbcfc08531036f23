collect_ignore = [
    "tau2_real.py",  # only a child process uses it, with tau2-bench
    "verifiers_packages",  # plug-ins; importing them takes seconds per process
]
