"""What people have today, under the same faults: jobs whose ranks restart from the object store."""
