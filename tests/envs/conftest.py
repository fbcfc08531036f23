collect_ignore = [
    "tau2_real.py",  # for a child only: it needs tau2-bench
    "verifiers_packages",  # plug-ins; importing them takes seconds in each of the tests' processes
]
