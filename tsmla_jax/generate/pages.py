"""Bookkeeping of the cache's pages on the host, in plain integers: which request owns which page."""

from __future__ import annotations


def pages_for(tokens: int, page_size: int) -> int:
    """How many pages hold `tokens` tokens; the last of them may be filled in part."""
    return -(-tokens // page_size)


class PageAllocator:
    """Hands out the pages of one cache.

    A request reserves as many pages as it can need before it takes any, so no request finds the cache full half way.
    """

    def __init__(self, num_pages: int) -> None:
        """
        Args:
          num_pages: how many pages the cache has.

        Raises:
          ValueError: num_pages is below 1.
        """
        if num_pages < 1:
            raise ValueError(f"num_pages = {num_pages}; legal: at least 1")
        self.num_pages = num_pages
        self.peak = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._reserved = 0

    @property
    def available(self) -> int:
        """Pages that are neither taken nor reserved."""
        return len(self._free) - self._reserved

    def reserve(self, pages: int) -> bool:
        """Sets `pages` pages aside for a request, and returns True; False, and nothing changes, if there are fewer."""
        if pages > self.available:
            return False
        self._reserved += pages
        return True

    def take(self) -> int:
        """Takes one page out of a reservation, and returns it; ValueError if no page is reserved."""
        if self._reserved == 0:
            raise ValueError("take() without a reservation: reserve() first")
        self._reserved -= 1
        page = self._free.pop()
        self.peak = max(self.peak, self.num_pages - len(self._free))
        return page

    def release(self, pages: list[int], unused: int) -> None:
        """Gives back the pages of a finished request, and the `unused` pages that it had reserved and did not take;
        ValueError if fewer are reserved."""
        if unused > self._reserved:
            raise ValueError(f"unused = {unused}; legal: at most the {self._reserved} pages still reserved")
        self._reserved -= unused
        self._free.extend(reversed(pages))


class PageTable:
    """The pages of one request, in the order of its tokens."""

    def __init__(self, allocator: PageAllocator, page_size: int, reserved: int) -> None:
        """
        Args:
          allocator: where the pages come from.
          page_size: tokens a page.
          reserved: how many pages `allocator.reserve` has already set aside for this request.
        """
        self.pages: list[int] = []
        self._allocator = allocator
        self._page_size = page_size
        self._unused = reserved

    def grow(self, tokens: int) -> None:
        """Takes pages until `tokens` tokens fit; ValueError if this needs more pages than were reserved."""
        while len(self.pages) * self._page_size < tokens:
            if self._unused == 0:
                raise ValueError(f"tokens = {tokens}; legal: at most {len(self.pages) * self._page_size}, as reserved")
            self.pages.append(self._allocator.take())
            self._unused -= 1

    def release(self) -> None:
        """Gives all pages back, the reserved ones too, and leaves the table empty."""
        self._allocator.release(self.pages, self._unused)
        self.pages, self._unused = [], 0
