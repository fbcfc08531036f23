collect_ignore = ["tau2_real.py"]  # for a child only: it needs tau2-bench
