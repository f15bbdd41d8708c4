"""Become the program of the row's client: any_client.py TASK_FILE RESULT_FILE."""

import json
import os
import sys

with open(sys.argv[1]) as file:
    python, program = json.load(file)["extra_info"]["client"]
os.environ["PYTHONPATH"] = os.path.dirname(__file__)
os.execv(python, [python, program, *sys.argv[1:]])
