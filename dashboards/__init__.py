"""From the ledger's trial folders to one tidy table, statistics, figures and a report.

Everything here reads; nothing trains. `table` loads, `stats` and `compare` judge, `figures` draws, `report` tells,
`export` hands on, and `ui` opens MLflow on the right store.
"""
