import { image, type Image } from "agentflow-client";
import { expect, it } from "vitest";
import { closeField, holdForField, imageOf } from "./kept";

const picture = (last: number): Promise<Image> =>
  image(Uint8Array.of(0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a, last));

it("f37: a picture that is read after its field was closed is not kept", async () => {
  const field = {};
  const [early, late] = [await picture(1), await picture(2)];
  holdForField(early, field);
  expect(imageOf(early.source)).toBe(early);
  closeField(field);
  expect(imageOf(early.source)).toBeUndefined();
  holdForField(late, field);
  expect(imageOf(late.source)).toBe(late); // a view that outlives the field may take it now
  await Promise.resolve();
  expect(imageOf(late.source)).toBeUndefined();
});
