"""Benchmarks: a folder for each subject, a script for each published table or figure, results in results/."""
