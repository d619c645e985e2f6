// Keeps the end of a growing text in sight, until the reader scrolls up.
import type { RefObject } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";

/** From this far above the end, scrolling down begins to follow again. */
const NEAR_END = 32;

export interface Following {
  /** Goes to the end, and follows it from now on. */
  toEnd(): void;
  /** Goes to the end if it is being followed. */
  catchUp(): void;
  stop(): void;
}

/**
 * Scrolls `scroller` to its end whenever `content`, which is inside it, changes its size while `isActive`. Scrolling
 * up ends this; scrolling down to the end begins it again.
 */
export function followEnd(content: Element, scroller: Element, isActive: () => boolean): Following {
  const source = scroller === document.scrollingElement ? document : scroller;
  let isFollowing = true;
  let top = scroller.scrollTop;
  const goToEnd = (): void => {
    scroller.scrollTop = scroller.scrollHeight;
    top = scroller.scrollTop;
  };
  const onScroll = (): void => {
    const left = scroller.scrollHeight - scroller.clientHeight - scroller.scrollTop;
    // Content that became shorter moves the window up too, but then the end is in sight.
    if (left < 2 || (scroller.scrollTop > top && left < NEAR_END)) isFollowing = true;
    else if (scroller.scrollTop < top) isFollowing = false;
    top = scroller.scrollTop;
  };
  const observer = new ResizeObserver(() => {
    if (isFollowing && isActive()) goToEnd();
  });
  source.addEventListener("scroll", onScroll, { passive: true });
  observer.observe(content);
  return {
    toEnd() {
      isFollowing = true;
      goToEnd();
    },
    catchUp() {
      if (isFollowing) goToEnd();
    },
    stop() {
      observer.disconnect();
      source.removeEventListener("scroll", onScroll);
    },
  };
}

/** The same for a box and its content, while both are mounted. A box that grows with its content is left alone. */
export function useFollowEnd(
  content: RefObject<Element | null>,
  scroller: RefObject<Element | null>,
  isActive: () => boolean,
): void {
  const active = useRef(isActive);
  active.current = isActive;
  useLayoutEffect(() => {
    if (!content.current || !scroller.current || getComputedStyle(scroller.current).overflowY === "visible") return;
    return followEnd(content.current, scroller.current, () => active.current()).stop;
  }, []);
}
