"""What is asked of a server: prompts, lengths and arrivals, seeded. Shared by bench and sim."""

from headway.workload.mixed import WORKLOADS, OfflineWorkload, WorkItem, parse_workload

__all__ = ["WORKLOADS", "OfflineWorkload", "WorkItem", "parse_workload"]
