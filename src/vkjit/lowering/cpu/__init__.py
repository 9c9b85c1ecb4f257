"""CPU schedules: groups as vector loops over tasks, without barriers."""
