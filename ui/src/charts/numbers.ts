// Numbers as text, in the same form everywhere on the page.

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const ONE = new Intl.NumberFormat("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

/** Shown where there is no number yet. */
export const NONE = "–";

/** `12,345`. */
export function count(value: number): string {
  return WHOLE.format(value);
}

/** `1 token`, `12 tokens`. */
export function counted(value: number, noun: string, plural = `${noun}s`): string {
  return `${count(value)} ${value === 1 ? noun : plural}`;
}

/** A count in at most five characters: `980`, `12.3k`, `4.0M`. */
export function compact(value: number): string {
  const size = Math.abs(value);
  if (size < 999.5) return size < 100 && !Number.isInteger(value) ? ONE.format(value) : WHOLE.format(value);
  if (size < 999_950) return `${scaled(value / 1e3)}k`;
  if (size < 999_950_000) return `${scaled(value / 1e6)}M`;
  return `${scaled(value / 1e9)}G`;
}

function scaled(value: number): string {
  return Math.abs(value) >= 100 ? WHOLE.format(value) : ONE.format(value);
}

/** A share from 0 to 1 as `82%`; below ten percent with one decimal, and 100% only if it is all. */
export function percent(share: number | null): string {
  if (share === null || !Number.isFinite(share)) return NONE;
  const points = share * 100;
  if (points >= 99.5 && points < 100) return `${ONE.format(Math.min(points, 99.9))}%`;
  return `${points !== 0 && points < 9.95 ? ONE.format(points) : WHOLE.format(points)}%`;
}

/** Seconds in the unit that suits them: `840 µs`, `12.3 ms`, `1.24 s`, `3 min 20 s`. */
export function duration(seconds: number | null): string {
  if (seconds === null || !Number.isFinite(seconds)) return NONE;
  if (seconds < 0.000_999_5) return seconds === 0 ? "0 s" : `${WHOLE.format(seconds * 1e6)} µs`;
  if (seconds < 0.099_95) return `${ONE.format(seconds * 1e3)} ms`;
  if (seconds < 0.999_5) return `${WHOLE.format(seconds * 1e3)} ms`;
  if (seconds < 9.995) return `${seconds.toFixed(2)} s`;
  if (seconds < 119.5) return `${ONE.format(seconds)} s`;
  const whole = Math.round(seconds);
  if (whole < 7200) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}
