"""The runs of a store of MLflow, as MLflow reads them: read_mlflow.py URI."""

import json
import os
import sys

os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"

from mlflow import MlflowClient  # noqa: E402


def main(uri: str) -> None:
    client = MlflowClient(uri)
    runs = []
    for run in client.search_runs([client.get_experiment_by_name("megatron_dapo").experiment_id]):
        histories = {
            name: [[point.step, repr(point.value)] for point in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        }
        runs.append(
            {
                "name": run.info.run_name,
                "id": run.info.run_id,
                "status": run.info.status,
                "params": run.data.params,
                "metrics": histories,
            }
        )
    print(json.dumps(runs))


if __name__ == "__main__":
    main(*sys.argv[1:])
