"""GPU schedules: groups as grids of workgroups with shared memory and barriers."""
