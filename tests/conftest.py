import os

# Nothing in the tests may reach a hub; and two cores are shared with worker processes.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "2")
