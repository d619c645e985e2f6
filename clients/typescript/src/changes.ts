// Calls the callbacks of changed variables together, once per frame of the screen.

// In a hidden page there are no frames, and a page may become hidden while it waits for one.
const HIDDEN_MS = 250;
const NO_SCREEN_MS = 16;

/** A callback that is due. */
export interface Due {
  run(): void;
}

let due = new Set<Due>();
let isScheduled = false;

/** Runs `one` with the next frame, once however often it is announced before. */
export function announce(one: Due): void {
  due.add(one);
  if (isScheduled) return;
  isScheduled = true;
  let timer: ReturnType<typeof setTimeout> | undefined;
  let frame: number | undefined;
  const run = (): void => {
    clearTimeout(timer);
    if (frame !== undefined) cancelAnimationFrame(frame);
    runAll();
  };
  const hasFrames = typeof requestAnimationFrame === "function";
  if (hasFrames) frame = requestAnimationFrame(run);
  timer = setTimeout(run, hasFrames ? HIDDEN_MS : NO_SCREEN_MS);
}

/** Forgets a callback that was announced. */
export function forget(one: Due): void {
  due.delete(one);
}

function runAll(): void {
  isScheduled = false;
  const now = due;
  due = new Set();
  for (const one of now) guarded(() => one.run());
}

/** Calls a function of the program; an error in it is reported like one in an event handler. */
export function guarded(call: () => void): void {
  try {
    call();
  } catch (error) {
    if (typeof reportError === "function") reportError(error);
    else
      queueMicrotask(() => {
        throw error;
      });
  }
}
