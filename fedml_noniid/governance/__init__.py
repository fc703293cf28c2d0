"""What a site decides and can prove: signed studies, its policy, its audit log, and the replay of
what it has sent."""

from fedml_noniid import extras

extras.require(extras.SILO)
