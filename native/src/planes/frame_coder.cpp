#include "planes/frame_coder.hpp"

#include <new>
#include <stdexcept>
#include <string>

#include <zstd.h>

namespace dsh {
namespace {

// The parameter that headers name only where zstd is linked statically: whether single bytes are coded by Huffman's
// code, of which a large step between places that are looked at would make a no. In its enum 1 is yes.
constexpr auto literal_compression = static_cast<ZSTD_cParameter>(1002);

// Return what a call of zstd has returned, or throw its error.
std::size_t checked(std::size_t found, const char *what) {
    if (ZSTD_isError(found) != 0) {
        throw std::runtime_error(std::string("zstd ") + ZSTD_versionString() + " can't " + what + ": " +
                                 ZSTD_getErrorName(found));
    }
    return found;
}

} // namespace

FrameCoder::FrameCoder(Matching matching) : context_(ZSTD_createCCtx()) {
    if (!context_) {
        throw std::bad_alloc();
    }
    const auto set = [this](ZSTD_cParameter parameter, int value) {
        checked(ZSTD_CCtx_setParameter(context_.get(), parameter, value), "be set up for planes");
    };
    const bool few = matching == Matching::few;
    set(ZSTD_c_compressionLevel, 1);
    set(ZSTD_c_strategy, ZSTD_fast);
    set(ZSTD_c_windowLog, 20);
    set(ZSTD_c_minMatch, 7);
    set(ZSTD_c_hashLog, few ? 6 : 14);
    set(ZSTD_c_targetLength, few ? 32 : 0);
    set(literal_compression, 1);
}

std::size_t FrameCoder::most_bytes(std::size_t count) { return ZSTD_compressBound(count); }

std::size_t FrameCoder::code(const std::byte *plane, std::size_t count, std::byte *into) {
    return checked(ZSTD_compress2(context_.get(), into, most_bytes(count), plane, count), "code a plane");
}

void FrameCoder::Free::operator()(ZSTD_CCtx_s *context) const { ZSTD_freeCCtx(context); }

} // namespace dsh
