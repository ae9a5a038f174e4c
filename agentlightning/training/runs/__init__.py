"""What a training run writes down: its records in the store, and a folder of copies for people.

The records of a run, by kind:

- `step`: the figures of a step, such as `mean_reward`, `update.loss`, `completion_tokens`.
- `evaluation`: an evaluation after a step; `value` is its result.
- `alarm`: something that somebody should look at, named after the condition. A condition that lasts has a record in the
  step in which it was raised and one in the step in which it was over: `{"text": "entropy is 0.02 nats per token, ...",
  "state": "raised" | "over", "since": 7, "value": 0.02, "threshold": 0.05, "what_to_try": "entropy_coef, ..."}`;
  `since` is the step in which it was raised, and `what_to_try` is empty in the record that ends it. An alarm of
  something that happened once has a `text` alone.
- `checkpoint`: where weights and optimizer lie. `prompt`: a version of a prompt. `state`: what a later start needs.
- `ledger`: what became of the model calls of one rollout; see `ledger_record.py`.
"""
