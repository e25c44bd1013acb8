"""Operations of the engine's model, each with its plain-torch reference. Imports nothing from sarathi_lab."""
