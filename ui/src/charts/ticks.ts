// Round values for axes.

/** Values from 0 up to at least `most`, at most `maxTicks` + 1 of them, each a multiple of 1, 2 or 5 times a
 * power of ten. `whole`: no fractions. */
export function ticks(most: number, maxTicks = 4, whole = false): number[] {
  if (!(most > 0) || !Number.isFinite(most)) return [0, 1];
  const step = niceStep(most / maxTicks, whole);
  const found: number[] = [];
  for (let i = 0; ; i++) {
    const value = rounded(i * step, step);
    found.push(value);
    if (value >= most || i > maxTicks) return found;
  }
}

/** Round values inside `from`..`to` for an axis that begins anywhere. */
export function ticksBetween(from: number, to: number, maxTicks = 6): number[] {
  const span = to - from;
  if (!(span > 0) || !Number.isFinite(span)) return [];
  const step = niceStep(span / maxTicks, false);
  const found: number[] = [];
  for (let i = Math.ceil(from / step - 1e-9); i * step <= to + step * 1e-9; i++) {
    found.push(rounded(i * step, step));
  }
  return found;
}

/** The smallest of 1, 2, 5 times a power of ten that is at least `least`. */
function niceStep(least: number, whole: boolean): number {
  const power = 10 ** Math.floor(Math.log10(least));
  const factor = [1, 2, 5, 10].find((one) => one * power >= least * (1 - 1e-9)) ?? 10;
  const step = factor * power;
  return whole ? Math.max(1, Math.ceil(step)) : step;
}

/** `value` without the error of binary fractions. */
function rounded(value: number, step: number): number {
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  return Number(value.toFixed(Math.min(digits, 12)));
}
