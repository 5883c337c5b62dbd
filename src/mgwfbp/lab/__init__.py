"""A cluster on one machine: hosts with shaped links, and one process per rank on them.

Example::

    from mgwfbp.lab import Cluster, parse_rate, run_lab

    cluster = Cluster(num_hosts=4, rate_bits_per_s=parse_rate("1gbit"))
    run_lab(cluster, ["python", "train.py"], on_line=print).check()
"""

from mgwfbp.lab.cluster import Cluster, Rank, parse_delay, parse_rate
from mgwfbp.lab.launch import LabResult, run_lab
from mgwfbp.lab.output import Line

__all__ = ["Cluster", "LabResult", "Line", "Rank", "parse_delay", "parse_rate", "run_lab"]
