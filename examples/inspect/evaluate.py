"""Evaluate a served model on an Inspect task and print the result."""
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

import argparse
import sys

from inspect_ai import eval as evaluate
from inspect_ai.model import get_model
from sums import HELD_OUT_SIZE, sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True, help="base URL of an OpenAI-compatible server")
    parser.add_argument("--model", default="policy", help="name of the model on the server")
    parser.add_argument("--api-key", default="unused", help="key of the server")
    parser.add_argument("--size", type=int, default=HELD_OUT_SIZE, help="number of samples")
    parser.add_argument("--max-retries", type=int, default=2, help="retries of a failed call")
    parser.add_argument("--log-dir", default="runs/inspect", help="folder of Inspect's logs")
    options = parser.parse_args()
    model = get_model(f"openai-api/served/{options.model}", base_url=options.endpoint, api_key=options.api_key)
    [log] = evaluate(
        sums(size=options.size),
        model=model,
        log_dir=options.log_dir,
        display="none",
        temperature=0.0,
        max_tokens=64,
        max_retries=options.max_retries,  # by default, Inspect repeats a call until the server answers
    )
    if log.status != "success" or log.results is None:
        sys.exit(f"The evaluation ended as {log.status}: {log.error.message if log.error else 'no results'}")
    for score in log.results.scores:
        for name, metric in score.metrics.items():
            print(f"{score.name} {name}: {metric.value:.3f} ({score.scored_samples} samples)")


if __name__ == "__main__":
    main()
