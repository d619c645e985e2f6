// What a user types into a field for a number.

type NumberInput = Pick<HTMLInputElement, "valueAsNumber" | "min" | "max" | "step">;

/** The nearest number that the field allows: within its bounds, and whole if its step is. Null: none was typed. */
export function typedNumber({ valueAsNumber: given, min, max, step }: NumberInput): number | null {
  if (!Number.isFinite(given)) return null;
  return Math.min(Number(max), Math.max(Number(min), Number.isInteger(Number(step)) ? Math.round(given) : given));
}
