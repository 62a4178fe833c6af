"""Why a program ran out of memory: what XLA, its allocator or a profiler wrote down, read, and what to do about it."""

from jremat.oom.causes import Cause, find_causes
from jremat.oom.diagnosis import Diagnosis, diagnose
from jremat.oom.dump import Dump
from jremat.oom.launch import Launch, check_launch
from jremat.oom.read import read_dump

__all__ = ["Cause", "Diagnosis", "Dump", "Launch", "check_launch", "diagnose", "find_causes", "read_dump"]
