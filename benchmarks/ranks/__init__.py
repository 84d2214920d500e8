"""Large gangs that are played on one machine: real messages and layouts, and no tensor bytes."""
