// Which part of the tree is on the screen: zoom and pan. All functions are pure.

/** `left`, `top`: the position (tokens, rows) in the upper left corner. `perToken`, `perRow`: pixels. */
export interface View {
  readonly left: number;
  readonly top: number;
  readonly perToken: number;
  readonly perRow: number;
}

/** What is shown, in tokens and rows, and the picture's size in pixels. */
export interface Extent {
  readonly width: number;
  readonly rows: number;
  readonly pixelWidth: number;
  readonly pixelHeight: number;
}

const MIN_ROW = 7;
const MAX_ROW = 34;
const MAX_ZOOM_ROW = 120;
const MAX_ZOOM_TOKEN = 80;

/** The whole width; all rows if they are high enough to see, else as many as fit. */
export function fitted(extent: Extent): View {
  const perToken = extent.width > 0 ? Math.min(extent.pixelWidth / extent.width, MAX_ZOOM_TOKEN) : 1;
  const perRow = extent.rows > 0 ? clamp(extent.pixelHeight / extent.rows, MIN_ROW, MAX_ROW) : MAX_ROW;
  return { left: 0, top: 0, perToken, perRow };
}

/** Zooms by `factor` in both directions; the position under the pixel (x, y) stays where it is. */
export function zoomed(view: View, extent: Extent, factor: number, x: number, y: number): View {
  const whole = fitted(extent);
  const lowestRow = Math.min(whole.perRow, MIN_ROW, extent.pixelHeight / Math.max(1, extent.rows));
  const perToken = clamp(view.perToken * factor, whole.perToken, MAX_ZOOM_TOKEN);
  const perRow = clamp(view.perRow * factor, lowestRow, MAX_ZOOM_ROW);
  return bounded(
    {
      left: view.left + x / view.perToken - x / perToken,
      top: view.top + y / view.perRow - y / perRow,
      perToken,
      perRow,
    },
    extent,
  );
}

/** Moves the picture by pixels. */
export function panned(view: View, extent: Extent, dx: number, dy: number): View {
  return bounded({ ...view, left: view.left - dx / view.perToken, top: view.top - dy / view.perRow }, extent);
}

/** Shows an area: its whole width if `fill`, else it only moves so far that the area begins inside. */
export function revealed(
  view: View,
  extent: Extent,
  area: { readonly x: number; readonly y: number; readonly width: number; readonly rows: number },
  fill: boolean,
): View {
  if (fill) {
    const whole = fitted(extent);
    const perToken = clamp(
      (0.9 * extent.pixelWidth) / Math.max(area.width, 1),
      whole.perToken,
      MAX_ZOOM_TOKEN,
    );
    const perRow = clamp((0.9 * extent.pixelHeight) / Math.max(area.rows, 1), MIN_ROW, MAX_ROW);
    const [spareX, spareY] = [
      extent.pixelWidth / perToken - area.width,
      extent.pixelHeight / perRow - area.rows,
    ];
    return bounded({ left: area.x - spareX / 2, top: area.y - spareY / 2, perToken, perRow }, extent);
  }
  const [shownX, shownY] = [extent.pixelWidth / view.perToken, extent.pixelHeight / view.perRow];
  return bounded(
    {
      ...view,
      left: shifted(view.left, shownX, area.x, area.width),
      top: shifted(view.top, shownY, area.y, area.rows),
    },
    extent,
  );
}

/** The start of a window of this length that shows the area; of a longer area its beginning. */
function shifted(start: number, length: number, from: number, size: number): number {
  const covers = from <= start && from + size >= start + length;
  if (covers || (from >= start && from + size <= start + length)) return start;
  return from < start || size >= length ? from : from + size - length;
}

/** The view without empty space beyond the edges. */
export function bounded(view: View, extent: Extent): View {
  const maxLeft = Math.max(0, extent.width - extent.pixelWidth / view.perToken);
  const maxTop = Math.max(0, extent.rows - extent.pixelHeight / view.perRow);
  return { ...view, left: clamp(view.left, 0, maxLeft), top: clamp(view.top, 0, maxTop) };
}

function clamp(value: number, least: number, most: number): number {
  return Math.min(Math.max(value, least), Math.max(least, most));
}
