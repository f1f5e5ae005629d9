"""The job as a benchmark of FLGo, which finds it by its name: data and calculator are in `core`."""
