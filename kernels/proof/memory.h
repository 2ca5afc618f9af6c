// Memory as the explorer sees it: locations that remember who wrote and who read them, and what they hold. Owns the two
// questions of every access - is it ordered after the accesses that it conflicts with, and is the content the expected
// one - and the words for a place. Used by accesses.cpp; knows nothing of tasks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "proof/clocks.h"

namespace moe::proof {

enum class PlaceKind : std::int32_t {
  kTokens = 0,   // tokens of a rank: [source, 1]
  kWeights,      // route weights of a rank
  kClassCounts,  // class counts of a rank
  kRouteOrder,   // sorted routes of a rank
  kHeader,       // header of rank i in a rank's memory
  kTables,       // a rank's tables, and its counters zeroed
  kXRing,        // [slot, piece]
  kARing,        // [slot, act column tile]
  kRowTable,     // home rank and route number of every row, in backward its weight too
  kDyRows,       // [row tile, piece]
  kXRows,        // [row tile, piece]
  kDh,           // [row tile, kPartialColumns columns]: dh, before it recomputed h
  kScaledA,      // [row tile, dgrad column tile]
  kPartials,     // [row tile, dgrad column tile]
  kHomeRows,     // [route, hidden column tile]
  kHomeGrads,    // [route, 1]: dS
};
inline constexpr std::int64_t kNumPlaceKinds = 16;

inline constexpr const char* kPlaceNames[] = {
    "tokens",    "route weights", "class counts", "route order", "header",   "tables",      "x ring",    "a ring",
    "row table", "dy rows",       "x rows",       "dh",          "scaled a", "dS partials", "home rows", "home dS"};
static_assert(sizeof(kPlaceNames) / sizeof(kPlaceNames[0]) == static_cast<std::size_t>(kNumPlaceKinds),
              "every kind of place has a name");

// What lies in a location: the launch that put it there and what it is (a row tile and a piece or column, a route and
// an expert). 0 is nothing.
using Tag = std::uint64_t;
inline Tag make_tag(std::int64_t launch, std::int64_t a, std::int64_t b) {
  return (static_cast<Tag>(launch) << 44) | (static_cast<Tag>(a) << 20) | static_cast<Tag>(b);
}
inline std::string tag_text(Tag tag) {
  if (tag == 0) return "nothing";
  return "(launch " + std::to_string(tag >> 44) + ", " + std::to_string((tag >> 20) & 0xFFFFFFu) + ", " +
         std::to_string(tag & 0xFFFFFu) + ")";
}

struct Location {
  Stamp written{-1, 0};
  Tag tag = 0;
  std::vector<Stamp> readers;  // since it was written; the latest of each strand
};

// Locations of one kind on one rank, [rows, columns].
class Grid {
 public:
  Grid() = default;
  Grid(PlaceKind kind, std::int64_t rank, std::int64_t rows, std::int64_t columns)
      : kind_(kind), rank_(rank), columns_(columns), locations_(static_cast<std::size_t>(rows * columns)) {}

  Location& at(std::int64_t row, std::int64_t column) {
    return locations_.at(static_cast<std::size_t>(row * columns_ + column));
  }
  std::string place(std::int64_t row, std::int64_t column) const {
    return std::string(kPlaceNames[static_cast<std::size_t>(kind_)]) + "[" + std::to_string(row) + ", " +
           std::to_string(column) + "] of rank " + std::to_string(rank_);
  }

 private:
  PlaceKind kind_ = PlaceKind::kTokens;
  std::int64_t rank_ = 0;
  std::int64_t columns_ = 1;
  std::vector<Location> locations_;
};

// Who accesses: what it knows, by which proxy, and the stamp that it leaves.
struct Accessor {
  const Knowledge& knowledge;
  bool async;
  Stamp stamp;
};

enum class Conflict : std::int32_t { kNone = 0, kUnorderedWrite, kUnorderedRead, kWrongContent };

struct Verdict {
  Conflict conflict = Conflict::kNone;
  Stamp other{-1, 0};
};

inline Verdict read_location(Location& location, const Accessor& by, Tag expected) {
  if (location.written.strand >= 0 && !by.knowledge.ordered(location.written, by.async)) {
    return {Conflict::kUnorderedWrite, location.written};
  }
  if (location.tag != expected) return {Conflict::kWrongContent, location.written};
  for (Stamp& reader : location.readers) {
    if (reader.strand == by.stamp.strand) {
      reader.epoch = by.stamp.epoch;
      return {};
    }
  }
  location.readers.push_back(by.stamp);
  return {};
}

inline Verdict write_location(Location& location, const Accessor& by, Tag tag) {
  if (location.written.strand >= 0 && !by.knowledge.ordered(location.written, by.async)) {
    return {Conflict::kUnorderedWrite, location.written};
  }
  for (const Stamp& reader : location.readers) {
    if (!by.knowledge.ordered(reader, by.async)) return {Conflict::kUnorderedRead, reader};
  }
  location.readers.clear();
  location.written = by.stamp;
  location.tag = tag;
  return {};
}

}  // namespace moe::proof
