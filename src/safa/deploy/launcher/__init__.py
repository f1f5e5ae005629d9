"""The launcher: starts, watches and stops the processes of a deployment on this machine."""
