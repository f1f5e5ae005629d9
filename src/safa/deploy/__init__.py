"""The protocol on real devices, on Flower.

Three parts: `exchange` (messages, codec, screening, identity; no network), `flower` (both ends on Flower), `launcher`
(all of it as processes). Read first: `exchange.messages`, `exchange.coordinator`, `exchange.device`.
"""
