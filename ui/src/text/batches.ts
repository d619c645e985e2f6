// Changes of many columns at once, made together: with hundreds of streams, one frame for all costs far less than
// a frame for each.

const EVERY_MS = 80;
let due: (() => void)[] = [];

/** Runs `change` soon, in one frame with the others. */
export function inBatch(change: () => void): void {
  due.push(change);
  if (due.length > 1) return;
  setTimeout(() => {
    const batch = due;
    due = [];
    for (const one of batch) one();
  }, EVERY_MS);
}
