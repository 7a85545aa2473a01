"""The declared records: what each file of `benchmarks/results` is shown as."""

from benchmarks.records import attention, indexer, models, others
from benchmarks.table import Record

RECORDS: tuple[Record, ...] = (*attention.RECORDS, *indexer.RECORDS, *others.RECORDS, *models.RECORDS)
