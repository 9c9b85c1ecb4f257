"""From programs to groups, schedules, memory and ordered steps: plain data without kernels."""
