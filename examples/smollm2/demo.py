"""`make demo-llm`: DAPO on single-digit products with a real language model, SmolLM2-135M-Instruct.

python -m examples.smollm2.demo [key=value ...]
"""

import sys

from examples.demo_run import Demo
from examples.smollm2.model import ensure_model
from examples.smollm2.problems import write_files

DEMO = Demo(
    title="DAPO on single-digit products: SmolLM2-135M-Instruct learns to answer (mostly: to answer briefly).",
    config="demo_llm.yaml",
    files=write_files,
    model=ensure_model,
    next_steps=(("use your own data and reward", "README.md, 'Your own data and reward'"),),
)

if __name__ == "__main__":
    sys.exit(DEMO.run(sys.argv[1:]))
