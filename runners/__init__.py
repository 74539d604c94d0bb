"""What a trial is and how one is run: vocabulary, tasks, model, training, evaluation, ledger, executors."""
