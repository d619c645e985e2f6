"""Images on the page: dropped, pasted and chosen, in turns and programs, kept for a reload or not."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from PIL import Image
from playwright.sync_api import Locator, expect
from support.ui.accessibility import axe_violations, scrolls_sideways
from support.ui.image_files import drop, picture
from support.ui.screen import Screen
from support.ui.stage import Stage, open_stage

Visit = Callable[..., Screen]
CHART = ("chart.png", "image/png", picture(80, 50))
PHOTO = ("photo.jpg", "image/jpeg", picture(90, 60, "JPEG"))


def open_view(screen: Screen, name: str) -> None:
    screen.open(name)
    screen.wait_status("open")


def thumbnails(within: Screen | Locator) -> Locator:
    return within.at("thumbnail") if isinstance(within, Screen) else within.get_by_test_id("thumbnail")


def test_a_dropped_pasted_and_chosen_image_are_sent_in_one_turn(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    open_view(screen, "chat")
    drop(screen, "main", CHART, kind="dragover")
    expect(screen.page.locator(".image-area.is-over")).to_be_visible()
    drop(screen, "main", CHART)
    expect(thumbnails(screen)).to_have_count(1)
    expect(screen.page.locator(".image-area.is-over")).to_have_count(0)
    drop(screen, "[data-testid=message]", PHOTO, kind="paste")
    expect(thumbnails(screen)).to_have_count(2)
    gif = {"name": "dot.gif", "mimeType": "image/gif", "buffer": picture(4, 4, "GIF")}
    screen.at("image-files").set_input_files([gif])
    expect(thumbnails(screen)).to_have_count(3)
    drop(screen, "main", CHART)  # it is there already
    screen.page.get_by_role("button", name="Remove photo.jpg").focus()
    screen.page.keyboard.press("Enter")
    expect(thumbnails(screen)).to_have_count(2)
    expect(screen.page.get_by_role("button", name="Add image")).to_be_focused()
    expect(screen.at("send")).to_be_enabled()
    screen.at("message").fill("What is it?")
    screen.at("message").press("Enter")
    stage.wait_running(1, to="<image><image>What is it?")
    assert [image.data for image in stage.seen[-2:]] == [CHART[2], gif["buffer"]]
    stage.say("A chart.")
    stage.end()
    expect(screen.page.get_by_role("button", name="Another reply")).to_be_enabled()
    turn = screen.at("turn-1")
    expect(thumbnails(turn)).to_have_count(2)
    expect(thumbnails(screen)).to_have_count(2)  # the composer is empty
    # The next message sends them again, from the session.
    screen.at("message").fill("Really?")
    screen.at("message").press("Enter")
    stage.wait_running(1, to="Really?")
    assert [image.data for image in stage.seen[-2:]] == [CHART[2], gif["buffer"]]
    stage.end()


def test_f37_each_dropped_file_that_is_no_image_is_named(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    open_view(screen, "chat")
    files = [(f"{name}.txt", "text/plain", b"no image") for name in ("first", "second")]
    drop(screen, "main", files[0], CHART, files[1])
    expect(screen.at("image-problem")).to_contain_text("first.txt")
    expect(screen.at("image-problem")).to_contain_text("second.txt")
    expect(thumbnails(screen)).to_have_count(1)
    expect(screen.page.get_by_role("button", name="Image files")).to_have_count(0)  # "Add image" opens it


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_images_are_accessible_and_fit_into_narrow_windows(stage: Stage, visit: Visit, scheme: str) -> None:
    screen = visit(stage.url, viewport={"width": 360, "height": 700}, color_scheme=scheme)
    open_view(screen, "chat")
    drop(screen, "main", CHART, PHOTO, ("notes.txt", "text/plain", b"no image"))
    expect(thumbnails(screen)).to_have_count(2)
    expect(screen.at("image-problem")).to_have_text("notes.txt cannot be read as an image.")
    assert axe_violations(screen) == []
    screen.page.get_by_role("button", name="Show chart.png, 80 × 50").focus()
    screen.page.keyboard.press("Enter")
    dialog = screen.page.get_by_role("dialog", name="chart.png")
    expect(dialog.get_by_role("img", name="chart.png")).to_be_visible()
    with screen.page.expect_download() as saved:
        dialog.get_by_role("link", name="Save").click()
    assert saved.value.suggested_filename == "chart.png"
    assert saved.value.path().read_bytes() == CHART[2]
    assert axe_violations(screen) == []
    assert scrolls_sideways(screen) == []
    screen.page.keyboard.press("Escape")
    expect(screen.page.get_by_role("button", name="Show chart.png")).to_be_focused()


def test_a_large_image_is_scaled_down_before_it_is_sent(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    open_view(screen, "chat")
    # An orientation that turns it: the page applies it, as the model would see it.
    turned = Image.new("RGB", (3000, 1500))
    exif = turned.getexif()
    exif[0x0112] = 6
    written = io.BytesIO()
    turned.save(written, "JPEG", exif=exif)
    drop(screen, "main", ("large.jpg", "image/jpeg", written.getvalue()))
    expect(thumbnails(screen)).to_contain_text("Scaled from 1,500 × 3,000 to 1,024 × 2,048")
    screen.at("send").click()
    stage.wait_running(1)
    assert Image.open(io.BytesIO(stage.seen[-1].data)).size == (1024, 2048)
    stage.end()


def test_images_outlive_a_reload_as_far_as_there_is_room(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    open_view(screen, "chat")
    noise = ("noise.png", "image/png", picture(800, 800, is_noise=True))  # 1.9 MB
    drop(screen, "main", CHART)
    expect(thumbnails(screen)).to_have_count(1)
    screen.at("send").click()
    stage.wait_running(1)
    stage.say("A chart.")
    stage.end()
    expect(screen.page.get_by_role("button", name="Another reply")).to_be_enabled()
    drop(screen, "main", noise)
    expect(thumbnails(screen)).to_have_count(2)
    expect(thumbnails(screen).nth(1)).to_contain_text("Not kept for a reload")
    expect(thumbnails(screen).nth(0)).not_to_contain_text("Not kept")
    screen.page.reload()
    screen.wait_status("open")
    expect(thumbnails(screen)).to_have_count(2)
    expect(thumbnails(screen).nth(1)).to_contain_text("Lost with the reload")
    assert axe_violations(screen) == []
    expect(screen.at("send")).to_be_disabled()
    screen.page.get_by_role("button", name="Remove noise.png").click()
    screen.at("message").fill("And now?")
    screen.at("send").click()
    stage.wait_running(1, to="And now?")
    assert stage.seen[-1].data == CHART[2]
    stage.end()


def test_a_turn_whose_image_was_lost_is_not_sent_without_it(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    open_view(screen, "chat")
    drop(screen, "main", ("noise.png", "image/png", picture(800, 800, is_noise=True)))
    expect(thumbnails(screen)).to_have_count(1)
    screen.at("send").click()
    stage.wait_running(1)
    stage.say("Noise.")
    stage.end()
    expect(screen.page.get_by_role("button", name="Another reply")).to_be_enabled()
    screen.page.reload()
    screen.wait_status("open")
    screen.page.get_by_role("button", name="Another reply").click()
    expect(screen.at("turns")).to_contain_text("An image was not kept for the reload")
    # The way on: edit the turn.
    screen.page.get_by_role("button", name="Edit").click()
    branch = screen.page.get_by_role("button", name="Send as a branch")
    expect(branch).to_be_disabled()
    screen.page.get_by_role("button", name="Remove noise.png").click()
    drop(screen, ".chat-turn .image-area", CHART)
    expect(branch).to_be_enabled()
    branch.click()
    stage.wait_running(1)
    assert stage.seen[-1].data == CHART[2]
    stage.end()


def test_a_model_without_vision_is_named_in_a_sentence(visit: Visit) -> None:
    with open_stage(images=False) as stage:
        screen = visit(stage.url)
        open_view(screen, "chat")
        drop(screen, "main", CHART)
        sentence = "scripted reads only text: images need a model that sees them."
        expect(screen.at("image-problem")).to_have_text(sentence)
        expect(thumbnails(screen)).to_have_count(0)
        screen.at("message").fill("Hello")  # goes on with text
        expect(screen.at("image-problem")).to_have_count(0)
        screen.page.get_by_role("button", name="Add image").click()
        expect(screen.at("image-problem")).to_have_text(sentence)


def test_a_program_has_images_in_its_turns(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    open_view(screen, "playground")
    drop(screen, "main", CHART)
    expect(thumbnails(screen)).to_have_count(1)
    drop(screen, ".step.is-say .image-area", PHOTO)
    expect(thumbnails(screen)).to_have_count(2)
    expect(thumbnails(screen.page.locator(".step.is-say"))).to_have_count(1)
    before = len(stage.seen)
    screen.at("run").click()
    stage.wait_running(4)
    stage.end()
    stage.wait_running(1)
    stage.end()
    expect(screen.at("ledger")).to_have_attribute("data-status", "done")
    assert {image.data for image in stage.seen[before:]} == {CHART[2], PHOTO[2]}
    expect(thumbnails(screen.page.locator(".stage"))).to_have_count(2)
    assert axe_violations(screen) == []
    screen.at("python").click()
    expect(screen.at("python-source")).to_contain_text('af.image("chart.png")')
    screen.page.keyboard.press("Escape")
    # The run's prompts have marks in their place.
    screen.page.get_by_role("link", name="Runs").click()
    screen.view("runs").get_by_text("related").first.click()
    expect(screen.at("call-prompt").get_by_test_id("image-mark")).to_have_count(1)
    screen.page.get_by_role("link", name="Playground").first.click()
    screen.page.reload()
    screen.wait_status("open")
    expect(thumbnails(screen)).to_have_count(2)
    expect(screen.at("run")).to_be_enabled()


def test_edits_while_an_image_is_read_are_kept(stage: Stage, visit: Visit) -> None:
    screen = visit(stage.url)
    open_view(screen, "playground")
    drop(screen, "main", ("large.png", "image/png", picture(4000, 3000)), CHART)
    screen.page.get_by_label("System", exact=True).fill("Be kind.")
    expect(thumbnails(screen)).to_have_count(2)
    expect(screen.page.get_by_label("System", exact=True)).to_have_value("Be kind.")
