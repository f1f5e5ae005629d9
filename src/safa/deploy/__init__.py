"""The protocol on real devices, on Flower.

Read in this order: `letters` (what is said), `conductor` (the server without its network), `device` (the client without
its network), `server_app` and `client_app` (both on Flower), `launch` (all of it as processes).
"""
