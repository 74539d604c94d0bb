"""What a trial is and how one is run: the vocabulary, the tasks, the model, training, evaluation, the ledger, executors."""
