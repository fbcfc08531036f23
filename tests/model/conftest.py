# For children only: importing them patches Triton.
collect_ignore = ["flash_on_cpu.py", "flash_worker.py"]
